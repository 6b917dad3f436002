package systemd

import (
	_ "embed"
	"strings"
)

//go:embed daemonset.yaml
var daemonSet string

// Manifest returns the Kubernetes objects that run the agent on every node, and what assigns addresses, as YAML, with
// this image.
func Manifest(image string) string {
	return strings.ReplaceAll(daemonSet, "image: IMAGE", "image: "+image)
}
