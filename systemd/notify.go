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

// Notifier tells systemd about the agent (sd_notify(3)). Without NOTIFY_SOCKET it does nothing. What cannot be sent is
// logged and forgotten, for the agent serves without being watched too. Its methods may be called from any goroutine.
type Notifier struct{ log *slog.Logger }

// New returns a Notifier.
func New(log *slog.Logger) *Notifier { return &Notifier{log} }

// Ready says that the agent does what its configuration asks for.
func (n *Notifier) Ready() { n.send(daemon.SdNotifyReady) }

// Reloading says that a new configuration is being read; Ready must follow, also when it was refused. The time is for
// units of Type=notify-reload, which ask for it.
func (n *Notifier) Reloading() {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		panic("systemd: no monotonic clock: " + err.Error())
	}
	n.send(fmt.Sprintf("%s\nMONOTONIC_USEC=%d", daemon.SdNotifyReloading, now.Nano()/1000))
}

// Status says in one line how the agent is; systemctl status shows it.
func (n *Notifier) Status(text string) { n.send("STATUS=" + strings.ReplaceAll(text, "\n", " ")) }

// Stopping says that the agent is about to end.
func (n *Notifier) Stopping() { n.send(daemon.SdNotifyStopping) }

// Run feeds the watchdog (WATCHDOG_USEC), twice in its interval, while alive returns nil, until ctx ends; alive must return
// within that half. An agent that is not alive is left to systemd, which kills it and starts another: the kernel forwards
// meanwhile. Without a watchdog it waits for ctx. Run fails when systemd's interval cannot be read.
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
			n.log.Error("watchdog not fed", "err", err)
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
