"""Scripts that tests run as jobs."""

LINEAR = """
    import sys, time
    import torch, swell
    from torch import nn
    from torch.utils.data import TensorDataset

    torch.manual_seed(0)
    x = torch.randn(200, 4)
    y = x @ torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    job = swell.elastic(model, optimizer, checkpoint_every_s=None)
    loader = job.loader(TensorDataset(x, y), batch_size=20)
    epochs, pace = int(sys.argv[1]), float(sys.argv[2])
    for epoch in job.epochs(epochs):
        for a, b in loader:
            time.sleep(pace)
            job.step(nn.functional.mse_loss(model(a), b))
        total = job.reduce(workers=1.0)["workers"]
        if job.is_leader:
            print("epoch", epoch, "workers", int(total), flush=True)
    if job.is_leader:
        weights = [round(w, 3) for w in model.weight.flatten().tolist()]
        print("weights", weights, "steps", job.steps, flush=True)
"""

LEAVING = """
    import os, sys, time
    import torch, swell
    from pathlib import Path
    from torch import nn
    from torch.utils.data import TensorDataset

    x = torch.randn(200, 4)
    model = nn.Linear(4, 1)
    job = swell.elastic(model, torch.optim.SGD(model.parameters(), lr=0.01), checkpoint_every_s=None)
    loader = job.loader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=20)
    try:
        for epoch in job.epochs(30):
            for a, b in loader:
                time.sleep(0.01)
                job.step(nn.functional.mse_loss(model(a), b))
    finally:
        policies = {os.sched_getscheduler(int(t.name)) for t in Path("/proc/self/task").iterdir()}
        seen = "idle" if policies == {os.SCHED_IDLE} else "busy"
        Path(sys.argv[1], os.environ["SWELL_WORKER"]).write_text(f"{seen} {job.steps}")
"""
"""Each worker writes in the end whether only idle processors serve it, and how many updates it made."""
