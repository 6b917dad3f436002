// Package must stops a test when a required step fails, and compares wanted with actual values.
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

// Do stops the test if err is not nil.
func Do(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Get returns the value of a call, and stops the test if the call failed: must.Get(os.ReadFile(path))(t).
func Get[T any](value T, err error) func(t testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		Do(t, err)
		return value
	}
}

// Fail stops the test unless err is an error whose text contains text.
func Fail(t testing.TB, err error, text string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), text) {
		t.Fatalf("error: %v\nwant: %s", err, text)
	}
}

// Equal stops the test and prints the difference unless got equals want. An empty slice or map equals a nil one, and
// unexported fields count.
func Equal[T any](t testing.TB, want, got T, opts ...cmp.Option) {
	t.Helper()
	if d := diff(want, got, opts); d != "" {
		t.Fatalf("-want +got:\n%s", d)
	}
}

// Row is like Equal for a row of a table: it names the row, and the test continues with the next one.
func Row[T any](t testing.TB, row any, want, got T, opts ...cmp.Option) {
	t.Helper()
	if d := diff(want, got, opts); d != "" {
		t.Errorf("%v: -want +got:\n%s", row, d)
	}
}

// True reports an error unless ok, and the test continues.
func True(t testing.TB, ok bool, format string, args ...any) {
	t.Helper()
	if !ok {
		t.Errorf(format, args...)
	}
}

// Need stops the test with an error unless ok.
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

// Run runs f, which must not fail, until the test calls stop or ends. stop waits until f returns.
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
