package bgp

import (
	"context"
	"log/slog"
	"maps"
	"slices"

	"github.com/osrg/gobgp/v3/pkg/log"
)

// logger passes gobgp's log on at debug level, because the speaker has its own messages for operators.
type logger struct{ log *slog.Logger }

// Panic does not panic: gobgp calls it on unknown messages, which must not affect other peers' routes.
func (l *logger) Panic(msg string, f log.Fields) { l.pass(slog.LevelError, msg, f) }

// Fatal does not end the process.
func (l *logger) Fatal(msg string, f log.Fields) { l.pass(slog.LevelError, msg, f) }
func (l *logger) Error(msg string, f log.Fields) { l.pass(slog.LevelError, msg, f) }
func (l *logger) Warn(msg string, f log.Fields)  { l.pass(slog.LevelDebug, msg, f) }
func (l *logger) Info(msg string, f log.Fields)  { l.pass(slog.LevelDebug, msg, f) }
func (l *logger) Debug(msg string, f log.Fields) { l.pass(slog.LevelDebug, msg, f) }

// SetLevel is not used by gobgp itself.
func (l *logger) SetLevel(log.LogLevel) {}

// GetLevel returns a level at which gobgp does not log each route.
func (l *logger) GetLevel() log.LogLevel { return log.InfoLevel }

func (l *logger) pass(level slog.Level, msg string, f log.Fields) {
	if !l.log.Enabled(context.Background(), level) {
		return
	}
	args := make([]any, 0, 2*len(f)+2)
	args = append(args, "text", msg)
	for _, k := range slices.Sorted(maps.Keys(f)) {
		args = append(args, k, f[k])
	}
	l.log.Log(context.Background(), level, "gobgp", args...)
}
