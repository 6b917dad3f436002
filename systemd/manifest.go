package systemd

import (
	_ "embed"
	"strings"
)

var (
	//go:embed daemonset.yaml
	daemonSet string
	//go:embed cleanup.yaml
	cleanup string
)

// Manifest returns the Kubernetes objects that run the agent on every node, and what assigns addresses, as YAML, with
// this image.
func Manifest(image string) string { return withImage(daemonSet, image) }

// CleanupManifest returns the Kubernetes object that runs "steelyard cleanup" on every node, once those of Manifest
// that run the agent were deleted.
func CleanupManifest(image string) string { return withImage(cleanup, image) }

func withImage(manifest, image string) string {
	return strings.ReplaceAll(manifest, "image: IMAGE", "image: "+image)
}
