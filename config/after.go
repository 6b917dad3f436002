package config

import (
	"net/netip"
	"strings"

	"github.com/BurntSushi/toml"
)

// ParseElsewhere parses the configuration of another machine: missing secret files are not an error.
func ParseElsewhere(file string, text []byte, rules ...Rule) (*Config, error) {
	d := newDecoder(file)
	d.elsewhere = true
	return d.decode(text, rules...)
}

// ParseAfter is like Parse, but decodes only the services whose text differs from that in before, an earlier version
// with its Services and Text, or nil. It takes the others from before, which share their slices.
func ParseAfter(before *Config, file string, text []byte, rules ...Rule) (*Config, error) {
	if before != nil {
		d, whole := newDecoder(file), string(text)
		if values := d.valuesAfter(before, whole); values != nil {
			if c, err := d.read(whole, values, rules...); err == nil {
				return c, nil
			}
		}
	}
	return Parse(file, text, rules...) // reports all errors
}

// valuesAfter returns what toml.Decode would return for text, but with an empty table for each service that d.unchanged
// takes from before. It returns nil if text must be decoded as a whole: if anything but services has changed, or if it
// is not certain which part of the text is a service.
func (d *decoder) valuesAfter(before *Config, text string) map[string]any {
	rest, services := split(text)
	restBefore, servicesBefore := split(before.Text)
	if len(services) == 0 || rest != restBefore || len(servicesBefore) != len(before.Services) {
		return nil
	}
	unchanged := make(map[string]*Service, len(servicesBefore))
	for n, s := range servicesBefore {
		if service := &before.Services[n]; !before.decodeAgain[service.Name] {
			unchanged[s] = service
		}
	}
	d.unchanged = make([]*Service, len(services))
	var changed strings.Builder
	for n, s := range services {
		if d.unchanged[n] = unchanged[s]; d.unchanged[n] == nil {
			changed.WriteString(s)
		}
	}
	values, decoded := map[string]any{}, map[string]any{}
	if _, err := toml.Decode(rest, &values); err != nil || values["service"] != nil {
		return nil
	}
	if _, err := toml.Decode(changed.String(), &decoded); err != nil {
		return nil
	}
	list, _ := decoded["service"].([]map[string]any)
	delete(decoded, "service")
	if len(decoded) > 0 {
		return nil
	}
	all := make([]map[string]any, len(services))
	for n := range services {
		if d.unchanged[n] != nil {
			continue
		}
		if len(list) == 0 {
			return nil
		}
		all[n], list = list[0], list[1:]
	}
	if len(list) > 0 {
		return nil
	}
	values["service"] = all
	return values
}

// split cuts a file into the text of each service and the rest. A service begins with a line [[service]] and ends
// before the next line that begins with a bracket, except of its own tables, such as [service.check]. Of a valid file,
// each part is valid on its own, unless a string has several lines, or a table of services is written in another way.
// In the first case there are no services, and in the second one the rest has a key "service".
func split(text string) (rest string, services []string) {
	if strings.Contains(text, `"""`) || strings.Contains(text, "'''") {
		return text, nil
	}
	var others strings.Builder
	start, inService := 0, false
	end := func(at int) {
		if inService {
			services = append(services, text[start:at])
		} else {
			others.WriteString(text[start:at])
		}
		start = at
	}
	at := 0
	for line := range strings.Lines(text) {
		switch line := strings.TrimLeft(line, " \t"); {
		case strings.HasPrefix(line, "[[service]]"):
			end(at)
			inService = true
		case inService && strings.HasPrefix(line, "[") && !strings.HasPrefix(line, "[service.") &&
			!strings.HasPrefix(line, "[[service."):
			end(at)
			inService = false
		}
		at += len(line)
	}
	end(at)
	return others.String(), services
}

// keepService adds a service whose text has not changed. A conflict with another service is an error, after which the
// whole file is decoded.
func (d *decoder) keepService(t *table, s *Service) {
	t.object = `service "` + s.Name + `"`
	d.objects[t.path] = t.object
	if d.names[s.Name] != "" {
		t.at("name").errorf("", "is used twice")
	}
	d.names[s.Name] = t.path
	vips := make([]placed[netip.Addr], len(s.Addresses))
	for i, a := range s.Addresses {
		vips[i] = placed[netip.Addr]{a, t.at("address")}
	}
	d.claimFrontends(vips, s.Ports)
	d.config.Services = append(d.config.Services, *s)
}
