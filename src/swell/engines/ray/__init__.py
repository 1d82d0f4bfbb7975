"""swell on Ray: Ray knows the nodes, starts processes and notices deaths; swell decides which job gets what.

The control plane itself never imports Ray, because Ray may end any process that is connected to a cluster.
Only separate processes speak to Ray: the `scout`, which watches the nodes, and each job's supervisor.
"""
