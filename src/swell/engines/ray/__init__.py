"""swell on Ray: Ray knows the nodes, starts processes and notices deaths; swell decides who gets what.

The control plane itself never imports Ray: a process that is connected to a Ray cluster may be ended by
it. What speaks to Ray are processes of their own: the `scout`, which watches nodes, and each job's
supervisor.
"""
