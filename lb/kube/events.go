package kube

import (
	"cmp"
	"context"
	"strings"

	core "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typed "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/record"

	"github.com/steelyard-lb/steelyard/lb"
)

// newRecorder returns a recorder of Events on Services, and a function that stops it.
func newRecorder(ctx context.Context, client kubernetes.Interface, node string) (record.EventRecorder, func()) {
	b := record.NewBroadcaster(record.WithContext(ctx))
	b.StartRecordingToSink(&typed.EventSinkImpl{Interface: client.CoreV1().Events("")})
	return b.NewRecorder(scheme.Scheme, core.EventSource{Component: "steelyard", Host: node}), b.Shutdown
}

// maxNote is the longest Event message that the API server accepts, in bytes.
const maxNote = 1024

// note truncates the message of an Event.
func note(text string) string {
	if len(text) > maxNote {
		text = strings.ToValidUTF8(text[:maxNote-3], "") + "..."
	}
	return text
}

// Self is the object of Events about an agent: its pod, or the Node if it does not run in a pod.
type Self struct {
	Client         kubernetes.Interface
	Node           string // "" if there is none
	Namespace, Pod string // Pod is "" if the agent does not run in a pod
	UID            types.UID
}

// Events returns a function that emits an Event, and one that stops the recorder.
func (s Self) Events(ctx context.Context) (emit func(kind, reason, text string), end func()) {
	on := &core.ObjectReference{
		APIVersion: "v1", Kind: "Pod", Namespace: s.Namespace, Name: s.Pod, UID: s.UID,
	}
	if s.Pod == "" {
		on = &core.ObjectReference{APIVersion: "v1", Kind: "Node", Name: s.Node, UID: types.UID(s.Node)} // like kubelet
	}
	events, end := newRecorder(ctx, s.Client, s.Node)
	return func(kind, reason, text string) {
		events.Event(on, kind, reason, note(text))
	}, end
}

// troubleReasons are the Event reasons for a Service's troubles; all others use reasonFrozen.
var troubleReasons = map[lb.Part]string{
	lb.PartEndpoints: "TooManyEndpoints", lb.PartEndpoint: "EndpointIgnored", lb.PartRoom: "NoRoom",
	lb.PartPort: reasonPortInUse,
}

const reasonFrozen = "Frozen"

// Tell implements lb.Boundary.Changed: it emits an Event on the Service that has a trouble. It may be called from any
// goroutine, and does nothing before Run has read the cluster.
func (s *Source) Tell(t lb.Trouble) {
	service, recorder := s.Service(t.Object), s.recorder.Load()
	if service == nil || recorder == nil {
		return
	}
	text := note("node " + s.o.Node + ": " + t.Reason)
	(*recorder).Event(service, core.EventTypeWarning, cmp.Or(troubleReasons[t.Part], reasonFrozen), text)
}
