"""pytorch-ignite: its engine, its parallel context, which starts the ranks itself."""

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from log import log
from tiny import mlp


def train(local_rank: int) -> None:
    model = idist.auto_model(mlp())
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.01))
    loader = idist.auto_dataloader(torch.randn(400, 256, generator=torch.Generator().manual_seed(0)), batch_size=16)

    def step(engine, batch):
        optimizer.zero_grad()
        loss = (model(batch) - batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    engine = Engine(step)
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda each: log(each.state.output, idist.get_rank()))
    engine.run(loader, max_epochs=2, epoch_length=10)


if __name__ == "__main__":
    with idist.Parallel(backend="gloo", nproc_per_node=2) as parallel:
        parallel.run(train)
