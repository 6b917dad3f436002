package healthd

import (
	"cmp"
	"context"
	"errors"
	"io"
	"net"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/grpclog"
	health "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
)

// By default gRPC logs to stderr, a line for each GOAWAY frame of some servers, and blocks until somebody reads it.
func init() { grpclog.SetLoggerV2(grpclog.NewLoggerV2(io.Discard, io.Discard, io.Discard)) }

// grpcChecker calls grpc.health.v1.Health/Check for the service in Path. "" means the whole server.
type grpcChecker struct{ target }

func (c grpcChecker) Probe(ctx context.Context) (Result, error) {
	creds := insecure.NewCredentials()
	if c.Spec.TLSServerName != "" || c.Spec.TLSCA != "" {
		creds = credentials.NewTLS(tlsConfig(c.Spec))
	}
	d, to, err := c.dialer("tcp")
	if err != nil {
		return Result{}, err
	}
	var mu sync.Mutex // guards dialErr and connected: gRPC dials in its own goroutine
	var dialErr error
	connected := false
	conn, err := grpc.NewClient("passthrough:///"+to.String(), grpc.WithTransportCredentials(creds),
		grpc.WithAuthority(cmp.Or(c.Spec.Host, c.Spec.TLSServerName, to.String())), grpc.WithDisableRetry(),
		grpc.WithDisableServiceConfig(), grpc.WithUserAgent("steelyard-health"), grpc.WithNoProxy(),
		grpc.WithMaxHeaderListSize(16<<10), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(16<<10)),
		grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
			conn, err := d.DialContext(ctx, "tcp", addr)
			mu.Lock()
			dialErr, connected = err, connected || err == nil
			mu.Unlock()
			return conn, err
		}))
	if err != nil {
		return Result{}, err
	}
	defer conn.Close()
	resp, err := health.NewHealthClient(conn).Check(ctx, &health.HealthCheckRequest{Service: c.Spec.Path})
	mu.Lock()
	defer mu.Unlock()
	if err != nil {
		s := status.Convert(err)
		switch {
		case s.Code() == codes.DeadlineExceeded || ctx.Err() != nil:
			return Result{}, context.DeadlineExceeded
		case connected && c.secondary():
			return ok("connected, no gRPC health service") // a secondary port may use another protocol
		case dialErr != nil:
			return Result{}, dialErr // err has only its text
		}
		return Result{}, errors.New("gRPC " + s.Code().String() + ": " + s.Message())
	}
	if resp.Status != health.HealthCheckResponse_SERVING {
		return Result{}, errors.New(resp.Status.String())
	}
	return ok("SERVING")
}
