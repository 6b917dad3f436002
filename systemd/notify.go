package systemd

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"golang.org/x/sys/unix"
)

// Notifier sends notifications to systemd (sd_notify(3)). Without NOTIFY_SOCKET it does nothing. A notification that
// cannot be sent is logged and dropped; the agent works without it. The methods may be called from any goroutine.
type Notifier struct{ log *slog.Logger }

// New returns a Notifier.
func New(log *slog.Logger) *Notifier { return &Notifier{log} }

// Ready reports that the configuration is in force.
func (n *Notifier) Ready() { n.send(daemon.SdNotifyReady) }

// Reloading reports that a reload has begun. Ready must follow, also when the configuration is refused. Units of
// Type=notify-reload need the time.
func (n *Notifier) Reloading() {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		panic("systemd: no monotonic clock: " + err.Error())
	}
	n.send(fmt.Sprintf("%s\nMONOTONIC_USEC=%d", daemon.SdNotifyReloading, now.Nano()/1000))
}

// Status sets the status line that "systemctl status" shows.
func (n *Notifier) Status(text string) { n.send("STATUS=" + strings.ReplaceAll(text, "\n", " ")) }

// Stopping reports that the agent is about to end.
func (n *Notifier) Stopping() { n.send(daemon.SdNotifyStopping) }

// Run notifies the watchdog (WATCHDOG_USEC) twice per interval while alive returns nil, until ctx ends. alive must return
// within half of the interval. When it returns errors, systemd kills and restarts the agent; the kernel forwards
// meanwhile. Without a watchdog Run waits for ctx. It fails when the interval is not valid.
func (n *Notifier) Run(ctx context.Context, alive func() error) error {
	interval, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		return fmt.Errorf("read the watchdog interval: %w", err)
	}
	if interval == 0 {
		<-ctx.Done()
		return nil
	}
	tick := time.NewTicker(interval / 2)
	defer tick.Stop()
	for {
		if err := alive(); err != nil {
			n.log.Error("watchdog not notified", "err", err)
		} else {
			n.send(daemon.SdNotifyWatchdog)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

func (n *Notifier) send(state string) {
	if _, err := daemon.SdNotify(false, state); err != nil {
		n.log.Warn("systemd not notified", "err", err)
	}
}
