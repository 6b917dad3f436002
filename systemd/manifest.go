package systemd

import (
	_ "embed"
	"fmt"
	"net/netip"
	"strings"
)

var (
	//go:embed daemonset.yaml
	daemonSet string
	//go:embed cleanup.yaml
	cleanup string
)

// Manifest returns, as YAML with this image, the Kubernetes objects that run the agent on every node and the address
// allocator. If configuration is given, it replaces the example of a router and a pool. The allocator's account may
// write only addresses in pools, or any address if there are none.
func Manifest(image, configuration string, pools ...netip.Prefix) string {
	manifest := daemonSet
	if configuration != "" {
		before, rest, _ := strings.Cut(daemonSet, "    # [bgp]\n")
		_, after, _ := strings.Cut(rest, "---\n")
		indented := "    " + strings.ReplaceAll(strings.TrimSuffix(configuration, "\n"), "\n", "\n    ")
		manifest = before + strings.ReplaceAll(indented, "    \n", "\n") + "\n---\n" + after
	}
	var quoted []string
	for _, p := range pools {
		quoted = append(quoted, "'"+p.String()+"'")
	}
	manifest = strings.Replace(manifest, `expression: "[]"`, `expression: "[`+strings.Join(quoted, ", ")+`]"`, 1)
	return withImage(manifest, image) + filledLater()
}

// filledLater returns the tunnel keys' Secret and the node table's ConfigMaps, all without data. The allocator fills
// them. It has no right to create objects, because that right would let it read other accounts' tokens.
func filledLater() string {
	const object = `---
apiVersion: v1
kind: %s
metadata:
  name: %s
  namespace: steelyard
  labels:
    app.kubernetes.io/name: steelyard
`
	text := fmt.Sprintf(object, "Secret", "steelyard-tunnel-keys")
	for i := range 16 {
		text += fmt.Sprintf(object+"    steelyard.dev/node-table: \"\"\n", "ConfigMap",
			fmt.Sprintf("steelyard-nodes-%x", i))
	}
	return text
}

// CleanupManifest returns the Kubernetes objects that run "steelyard cleanup" on every node. Apply them after deleting
// Manifest's objects that run the agent.
func CleanupManifest(image string) string { return withImage(cleanup, image) }

func withImage(manifest, image string) string {
	return strings.ReplaceAll(manifest, "image: IMAGE", "image: "+image)
}
