package lab

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"syscall"
	"time"
)

// Paths of the agent's files on its host.
const (
	AgentConfigPath = "/run/steelyard-lab/steelyard.toml"
	AgentSocketPath = "/run/steelyard/steelyard.sock"
)

// AgentOptions are the program and its configuration.
type AgentOptions struct {
	// Binary is the path of steelyard. It must not be below /run or /sys, which are private to a host.
	Binary string
	// Config is the configuration in TOML, as from AgentConfig.TOML.
	Config string
	// Env is added to the environment.
	Env []string
	// Output receives a copy of the log, unless it is nil.
	Output io.Writer
}

// Agent runs steelyard on a host, at most one process at a time. Its methods may be called from any goroutine.
type Agent struct {
	*Host
	o      AgentOptions
	client *http.Client

	mu     sync.Mutex // guards the following fields
	p      *Process
	config string
}

// StartAgent writes the configuration and starts "steelyard run". It does not wait until the agent is ready.
func StartAgent(h *Host, o AgentOptions) (*Agent, error) {
	a := &Agent{Host: h, o: o}
	a.client = &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return h.Dial(ctx, "unix", AgentSocketPath)
		},
	}}
	if err := a.Configure(o.Config); err != nil {
		return nil, err
	}
	return a, a.Start()
}

// Start starts the agent with the last configuration written, after Kill, Terminate or a crash.
func (a *Agent) Start() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.p != nil && a.p.Running() {
		return fmt.Errorf("host %s: the agent is already running, as process %d", a.Host, a.p.Pid())
	}
	if err := a.WriteFile(AgentConfigPath, a.config, 0o600); err != nil {
		return err
	}
	p, err := a.Host.Start(Command{
		Path: a.o.Binary, Args: []string{"run", "-c", AgentConfigPath}, Env: a.o.Env, Output: a.o.Output,
	})
	if err != nil {
		return err
	}
	a.p = p
	return nil
}

// Process returns the last process started.
func (a *Agent) Process() *Process {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.p
}

// Configure writes the configuration file. Call Reload or Start to make the agent read it.
func (a *Agent) Configure(text string) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.config = text
	return a.WriteFile(AgentConfigPath, text, 0o600)
}

// Reload makes the agent reread its configuration (SIGHUP). It does not wait for the result.
func (a *Agent) Reload() error { return a.Process().Signal(syscall.SIGHUP) }

// Kill sends SIGKILL and waits for the agent's end. The agent withdraws no routes, and its datapath stays in the
// kernel.
func (a *Agent) Kill() { a.Process().Kill() }

// Terminate sends SIGTERM and waits for the agent's end. It fails if this takes longer than within or the exit status
// is not 0.
func (a *Agent) Terminate(ctx context.Context, within time.Duration) error {
	return a.end(ctx, within, syscall.SIGTERM)
}

// EndForRestart is like Terminate with SIGUSR1, which leaves the routes to graceful restart.
func (a *Agent) EndForRestart(ctx context.Context, within time.Duration) error {
	return a.end(ctx, within, syscall.SIGUSR1)
}

func (a *Agent) end(ctx context.Context, within time.Duration, by syscall.Signal) error {
	p := a.Process()
	if err := p.Signal(by); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	if err := p.Wait(ctx); err != nil {
		return fmt.Errorf("stop the agent of host %s with %s: %w\n%s", a.Host, by, err, p.Log.Tail(10))
	}
	return nil
}

// Get requests path from the agent's admin socket and decodes the JSON response into v. A v of type *string receives
// the text.
func (a *Agent) Get(ctx context.Context, path string, v any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://agent"+path, nil)
	if err != nil {
		return err
	}
	resp, err := a.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("host %s: GET %s: %s: %s", a.Host, path, resp.Status, body)
	}
	if text, ok := v.(*string); ok {
		*text = string(body)
		return nil
	}
	if err := json.Unmarshal(body, v); err != nil {
		return fmt.Errorf("host %s: GET %s: %w in %s", a.Host, path, err, body)
	}
	return nil
}

// CLI runs a steelyard command on the host, such as "status", and returns its output.
func (a *Agent) CLI(ctx context.Context, args ...string) (string, error) {
	return a.Run(ctx, a.o.Binary, args...)
}

// WaitReady waits until the agent responds on its admin socket. It fails immediately if the agent ends.
func (a *Agent) WaitReady(ctx context.Context, within time.Duration) error {
	p := a.Process()
	_, err := Until(ctx, within, fmt.Sprintf("the agent of %s responds", a.Host), func() error {
		if err := p.Ended(); err != nil {
			return err
		}
		var status json.RawMessage
		return a.Get(ctx, "/v1/status", &status)
	})
	return err
}
