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
