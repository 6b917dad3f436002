package agent

import (
	"context"
	"fmt"
	"io"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/steelyard-lb/steelyard/lb/kube"
)

// CleanupCluster is "steelyard cleanup --cluster". With kubeconfig "" it uses kubectl's default, or the pod's.
func CleanupCluster(ctx context.Context, kubeconfig, namespace string, w io.Writer) error {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = kubeconfig
	c, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, nil).ClientConfig()
	if err != nil {
		return err
	}
	c.QPS, c.Burst = clientQPS, clientBurst
	client, err := kubernetes.NewForConfig(c)
	if err != nil {
		return err
	}
	n := 0
	err = kube.Cleanup(ctx, client, namespace, func(what string) {
		n++
		fmt.Fprintln(w, "cleaned up:", what)
	})
	if err != nil {
		return fmt.Errorf("clean up the cluster: %w", err)
	}
	_, err = fmt.Fprintf(w, "Steelyard has been removed from the cluster's Services; %d objects were changed\n", n)
	return err
}
