package kube

import (
	"crypto/sha256"
	"fmt"
	"slices"
	"strconv"
	"strings"

	core "k8s.io/api/core/v1"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
)

// Who knows the share key of a Service can have its address with another port, and then change the port, or the key, so
// that only one of the two can have it. It must not be the other one that loses it, even if that one is younger. So the
// status of a Service records with which key and ports it was assigned its addresses. All agents read there who has
// changed since: the leader, also one that was not there before, and the nodes, while there is no leader. The roles
// that Kubernetes has for users permit no write of a status.

// conditionShared is a condition of Services with a share key that have an address. Its message is their agreement.
const conditionShared = ourPrefix + "AddressShared"

// agreement is with which terms a Service was assigned its addresses, and when.
type agreement struct {
	terms string // "": it shares none, or they are not known
	// at is the newest version of any Service that was known then. A Service that changes back to earlier terms, before
	// the change is recorded, may have an agreement that conflicts with a later one. That one was made when this one
	// did not hold any more, and so with knowledge of a newer version than this one was written with.
	at uint64
}

// agreedAtText separates the two in the text.
const agreedAtText = "; at version "

func (a agreement) String() string { return a.terms + agreedAtText + strconv.FormatUint(a.at, 10) }

// termsLength is from which length on the terms are a sum, in bytes.
const termsLength = 1000

// terms returns what decides with whom a Service shares its addresses, as text; "": it shares none.
func terms(s *core.Service) string {
	key := annotation(s, wantShare)
	if key == "" {
		return ""
	}
	ports := make([]string, len(s.Spec.Ports))
	for i := range s.Spec.Ports {
		p := &s.Spec.Ports[i]
		ports[i] = fmt.Sprintf("%d/%s", p.Port, protocolOf(&p.Protocol))
	}
	slices.Sort(ports)
	text := fmt.Sprintf("%s by the key %q", strings.Join(ports, ", "), key)
	if len(text) > termsLength {
		text = fmt.Sprintf("%d ports, sum %x", len(ports), sha256.Sum256([]byte(text)))
	}
	return text
}

// agreement returns that of a Service which is assigned addresses now.
func (a *assigner) agreement(s *core.Service) agreement {
	if t := terms(s); t != "" {
		return agreement{t, a.newest}
	}
	return agreement{}
}

// agreementOf returns the agreement in the status of a Service.
func agreementOf(s *core.Service) agreement {
	c := apimeta.FindStatusCondition(s.Status.Conditions, conditionShared)
	if c == nil {
		return agreement{}
	}
	i := max(strings.LastIndex(c.Message, agreedAtText), 0)
	at, err := strconv.ParseUint(strings.TrimPrefix(c.Message[i:], agreedAtText), 10, 64)
	if err != nil {
		return agreement{}
	}
	return agreement{c.Message[:i], at}
}

// agreedAt returns since when a Service shares its addresses as it does; 0: it does not, or has changed since.
func agreedAt(s *core.Service) uint64 {
	if a := agreementOf(s); a.terms != "" && a.terms == terms(s) {
		return a.at
	}
	return 0
}
