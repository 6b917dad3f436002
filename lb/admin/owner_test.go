package admin

import (
	"context"
	"net/http"
	"net/http/httptest"
	"os"
	"testing"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// Members of the socket's group may not put a configuration in force, because it can run programs.
func TestOnlyOwnerApplies(t *testing.T) {
	for uid, want := range map[int]int{0: http.StatusOK, os.Geteuid(): http.StatusOK, 12345: 403, -1: 403} {
		w := httptest.NewRecorder()
		r := httptest.NewRequest(http.MethodPost, "/v1/apply", nil)
		served := func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) }
		asOwner(served)(w, r.WithContext(context.WithValue(r.Context(), uidKey{}, uid)))
		must.Row(t, uid, want, w.Code)
	}
}
