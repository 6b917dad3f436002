package main

import (
	"debug/buildinfo"
	"encoding/json"
	"os"
	"strings"
	"time"
)

// A module list in CycloneDX 1.5 (https://cyclonedx.org/docs/1.5/json).
type (
	bom struct {
		Format   string      `json:"bomFormat"`
		Spec     string      `json:"specVersion"`
		Version  int         `json:"version"`
		Metadata metadata    `json:"metadata"`
		Modules  []component `json:"components"`
	}
	metadata struct {
		Timestamp string    `json:"timestamp"`
		Component component `json:"component"`
	}
	component struct {
		Type       string     `json:"type"`
		Ref        string     `json:"bom-ref"`
		Name       string     `json:"name"`
		Version    string     `json:"version"`
		URL        string     `json:"purl"`
		Properties []property `json:"properties,omitempty"`
	}
	property struct {
		Name  string `json:"name"`
		Value string `json:"value"`
	}
)

// writeBOM writes the list of modules recorded in a binary by the go command.
func (r *release) writeBOM(arch string) error {
	info, err := buildinfo.ReadFile(r.binary(arch))
	if err != nil {
		return err
	}
	of := func(kind, path, version, sum string) component {
		url := "pkg:golang/" + path + "@" + version
		c := component{Type: kind, Ref: url, Name: path, Version: version, URL: url}
		if sum != "" { // from go.sum
			c.Properties = []property{{"go:sum", sum}}
		}
		return c
	}
	product := of("application", info.Main.Path, r.version, "")
	for _, s := range info.Settings {
		product.Properties = append(product.Properties, property{"go:" + s.Key, s.Value})
	}
	list := bom{
		Format: "CycloneDX", Spec: "1.5", Version: 1,
		Metadata: metadata{Timestamp: r.time.Format(time.RFC3339), Component: product},
		Modules:  []component{of("library", "std", strings.TrimPrefix(info.GoVersion, "go"), "")},
	}
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		list.Modules = append(list.Modules, of("library", m.Path, m.Version, m.Sum))
	}
	text, err := json.MarshalIndent(list, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(r.binary(arch)+".cdx.json", append(text, '\n'), 0o644)
}
