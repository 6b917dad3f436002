package healthd

import (
	"cmp"
	"context"
	"errors"
	"net"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	health "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
)

// grpcChecker calls grpc.health.v1.Health/Check for the service that Path names; "" is the whole server.
type grpcChecker struct{ target }

func (c grpcChecker) Probe(ctx context.Context) (Result, error) {
	creds := insecure.NewCredentials()
	if c.Spec.TLSServerName != "" {
		creds = credentials.NewTLS(tlsConfig(c.Spec))
	}
	d, to, err := c.dialer("tcp")
	if err != nil {
		return Result{}, err
	}
	conn, err := grpc.NewClient("passthrough:///"+to.String(), grpc.WithTransportCredentials(creds),
		grpc.WithAuthority(cmp.Or(c.Spec.Host, c.Spec.TLSServerName, to.String())), grpc.WithDisableRetry(),
		grpc.WithDisableServiceConfig(), grpc.WithUserAgent("steelyard-health"), grpc.WithNoProxy(),
		grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
			return d.DialContext(ctx, "tcp", addr)
		}))
	if err != nil {
		return Result{}, err
	}
	defer conn.Close()
	resp, err := health.NewHealthClient(conn).Check(ctx, &health.HealthCheckRequest{Service: c.Spec.Path})
	if err != nil {
		s := status.Convert(err)
		if s.Code() == codes.DeadlineExceeded || ctx.Err() != nil {
			return Result{}, context.DeadlineExceeded
		}
		return Result{}, errors.New("gRPC " + s.Code().String() + ": " + s.Message())
	}
	if resp.Status != health.HealthCheckResponse_SERVING {
		return Result{}, errors.New(resp.Status.String())
	}
	return ok("SERVING")
}
