"""A trainer in a package of its own: its counters must travel although the script is in another folder."""


class Engine:
    def __init__(self, model, optimizer, loss):
        self.model, self.optimizer, self.loss = model, optimizer, loss
        self.steps = 0
        self.seen = 0

    def run(self, loader, after):
        for x, y in loader:
            self.optimizer.zero_grad()
            self.loss(self.model(x), y).backward()
            self.optimizer.step()
            self.steps += 1
            after(len(x))
