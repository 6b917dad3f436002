package kube

import (
	"strings"

	"k8s.io/client-go/util/workqueue"
)

// newQueue returns a queue of names of Services, in which namespaces take turns.
func newQueue(delays workqueue.TypedRateLimiter[string]) workqueue.TypedRateLimitingInterface[string] {
	turns := &turns{names: map[string][]string{}}
	queue := workqueue.NewTypedWithConfig(workqueue.TypedQueueConfig[string]{Queue: turns})
	delaying := workqueue.NewTypedDelayingQueueWithConfig(workqueue.TypedDelayingQueueConfig[string]{Queue: queue})
	return workqueue.NewTypedRateLimitingQueueWithConfig(delays,
		workqueue.TypedRateLimitingQueueConfig[string]{DelayingQueue: delaying})
}

// turns implements workqueue.Queue. Many changes in one namespace do not delay other namespaces' changes.
type turns struct {
	namespaces []string            // the keys of names, the next one first
	names      map[string][]string // by namespace, never empty
	n          int
}

func (q *turns) Push(name string) {
	namespace, _, _ := strings.Cut(name, "/")
	if len(q.names[namespace]) == 0 {
		q.namespaces = append(q.namespaces, namespace)
	}
	q.names[namespace] = append(q.names[namespace], name)
	q.n++
}

func (q *turns) Pop() string {
	namespace := q.namespaces[0]
	q.namespaces = q.namespaces[1:]
	name, rest := q.names[namespace][0], q.names[namespace][1:]
	if q.names[namespace] = rest; len(rest) > 0 {
		q.namespaces = append(q.namespaces, namespace)
	} else {
		delete(q.names, namespace)
	}
	q.n--
	return name
}

func (q *turns) Len() int { return q.n }

func (*turns) Touch(string) {}
