// Package must ends a test at once where a step that it needs fails, and compares what a test wants with what it got.
package must

import (
	"context"
	"reflect"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// Do ends the test if err is not nil.
func Do(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Get returns the value of a call, and ends the test if the call failed: must.Get(os.ReadFile(path))(t).
func Get[T any](value T, err error) func(t testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		Do(t, err)
		return value
	}
}

// Fail ends the test unless err is an error whose text contains text.
func Fail(t testing.TB, err error, text string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), text) {
		t.Fatalf("error: %v\nwant: %s", err, text)
	}
}

// Equal ends the test, with the difference, unless got is what the test wants. An empty slice or map equals a nil one,
// and unexported fields count.
func Equal[T any](t testing.TB, want, got T, opts ...cmp.Option) {
	t.Helper()
	if d := diff(want, got, opts); d != "" {
		t.Fatalf("-want +got:\n%s", d)
	}
}

// Row is Equal for a row of a table: it names the row and lets the test go on with the next one.
func Row[T any](t testing.TB, row any, want, got T, opts ...cmp.Option) {
	t.Helper()
	if d := diff(want, got, opts); d != "" {
		t.Errorf("%v: -want +got:\n%s", row, d)
	}
}

// True reports what is wrong, and lets the test go on, unless ok.
func True(t testing.TB, ok bool, format string, args ...any) {
	t.Helper()
	if !ok {
		t.Errorf(format, args...)
	}
}

// Need ends the test, and says what is wrong, unless ok.
func Need(t testing.TB, ok bool, format string, args ...any) {
	t.Helper()
	if !ok {
		t.Fatalf(format, args...)
	}
}

func diff(want, got any, opts cmp.Options) string {
	all := cmp.Exporter(func(reflect.Type) bool { return true })
	return cmp.Diff(want, got, append(opts, cmpopts.EquateEmpty(), all)...)
}

// Run runs f, which must not fail, until the test calls stop or ends. stop waits for the end of f.
func Run(t testing.TB, f func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	t.Cleanup(stop)
	return stop
}
