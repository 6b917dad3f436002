// Package alerts tests the alerting rules with Prometheus. It is a module of its own because of Prometheus'
// requirements.
package alerts

import (
	"testing"

	"github.com/prometheus/prometheus/model/rulefmt"
)

// Prometheus accepts the rules, their expressions and the templates of their texts.
func TestRules(t *testing.T) {
	rules, errs := rulefmt.ParseFile("../../docs/monitoring/alerts.yaml", false)
	for _, err := range errs {
		t.Error(err)
	}
	if rules == nil || len(rules.Groups) != 1 || len(rules.Groups[0].Rules) < 10 {
		t.Errorf("too few rules: %+v", rules)
	}
}
