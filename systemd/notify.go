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

// Notifier sends the agent's state to systemd (sd_notify(3)). Without NOTIFY_SOCKET it does nothing. It only logs send
// failures, because the agent works without systemd. Its methods may be called from any goroutine.
type Notifier struct{ log *slog.Logger }

func New(log *slog.Logger) *Notifier { return &Notifier{log} }

// Ready sends READY=1: the configuration is applied.
func (n *Notifier) Ready() { n.send(daemon.SdNotifyReady) }

// Reloading sends RELOADING=1. Ready must follow, even if the new configuration is rejected. Type=notify-reload
// requires the time.
func (n *Notifier) Reloading() {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		panic("systemd: no monotonic clock: " + err.Error())
	}
	n.send(fmt.Sprintf("%s\nMONOTONIC_USEC=%d", daemon.SdNotifyReloading, now.Nano()/1000))
}

// Status sends a line that systemctl status shows.
func (n *Notifier) Status(text string) { n.send("STATUS=" + strings.ReplaceAll(text, "\n", " ")) }

// Stopping sends STOPPING=1: the agent is shutting down.
func (n *Notifier) Stopping() { n.send(daemon.SdNotifyStopping) }

// Run sends WATCHDOG=1 twice per watchdog interval (WATCHDOG_USEC) while check returns nil, until ctx ends. check must
// return within half an interval. If check fails, systemd restarts the agent; the kernel continues to forward. Without
// a watchdog, Run only waits for ctx. It fails if WATCHDOG_USEC is invalid.
func (n *Notifier) Run(ctx context.Context, check func() error) error {
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
		if err := check(); err != nil {
			n.log.Error("watchdog message not sent", "err", err)
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
		n.log.Warn("systemd notification not sent", "err", err)
	}
}
