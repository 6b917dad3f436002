package systemd

import (
	_ "embed"
	"strings"
)

//go:embed daemonset.yaml
var daemonSet string

// Manifest returns the Kubernetes objects that run the agent on every node, as YAML, with this image.
func Manifest(image string) string {
	return strings.Replace(daemonSet, "image: IMAGE", "image: "+image, 1)
}
