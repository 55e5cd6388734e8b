"""Training loops on one process that are not simply forward, backward, step; one a run, its steps known."""

import argparse
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

WIDTH, BATCH = 16, 4
MODES = {}


def mode(function):
    MODES[function.__name__] = function
    return function


def net():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


class Stream(IterableDataset):
    """Samples without end, and without a length."""

    def __iter__(self):
        while True:
            yield torch.randn(WIDTH)


def train(model, optimizer, batches):
    for x in batches:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
        yield


@mode
def stream():
    """An iterable dataset; every batch has a size that the loader knows and a number of batches that nobody knows."""
    model = net()
    loader = DataLoader(Stream(), batch_size=BATCH)
    yield from train(model, torch.optim.SGD(model.parameters(), lr=1e-3), loader)


@mode
def validation():
    """Every fourth step is followed by an evaluation that takes as long as many steps."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step, _ in enumerate(train(model, optimizer, DataLoader(Stream(), batch_size=BATCH)), 1):
        if step % 4 == 0:
            model.eval()
            with torch.inference_mode():
                for x, _ in zip(DataLoader(Stream(), batch_size=BATCH), range(3), strict=False):
                    model(x)
                    time.sleep(0.1)
            model.train()
        yield


@mode
def closure():
    """LBFGS calls forward and backward itself, several times per step."""
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def evaluate():
        optimizer.zero_grad()
        loss = model(torch.ones(BATCH, WIDTH)).pow(2).mean()
        loss.backward()
        return loss

    while True:
        optimizer.step(evaluate)
        yield


@mode
def in_backward():
    """Each parameter has an optimizer of its own, which steps as soon as the gradient is there."""
    model = net()
    optimizers = {parameter: torch.optim.SGD([parameter], lr=1e-3) for parameter in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
    while True:
        model(torch.randn(BATCH, WIDTH)).pow(2).mean().backward()
        yield


@mode
def by_hand():
    """No optimizer at all: the script marks where a step ends."""
    import perfscope

    model = net()
    while True:
        model(torch.randn(BATCH, WIDTH)).pow(2).mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 1e-3 * parameter.grad
                parameter.grad = None
        perfscope.step()
        yield


@mode
def without_optimizer():
    """Nor does it mark anything: a gradient penalty and a backward pass per step."""
    model = net()
    while True:
        x = torch.randn(BATCH, WIDTH, requires_grad=True)
        loss = model(x).pow(2).mean()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.pow(2).mean()).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 1e-3 * parameter.grad
                parameter.grad = None
        yield


@mode
def functional():
    """Gradients are returned, not written into the parameters."""
    model = net()
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).pow(2).mean()

    gradients = torch.func.grad(loss)
    while True:
        slopes = gradients(parameters, torch.randn(BATCH, WIDTH))
        parameters = {name: parameter - 1e-3 * slopes[name] for name, parameter in parameters.items()}
        yield


@mode
def scaled():
    """Mixed precision in which the gradients of two batches overflow."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", growth_interval=100)
    step = 0
    while True:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.randn(BATCH, WIDTH)).float().pow(2).mean()
        scaler.scale(loss * float("inf") if step in (1, 6) else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        step += 1
        yield


@mode
def compiled():
    """A compiled function around the model: nothing may be compiled again because of a recording."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    @torch.compile(backend="eager")
    def loss_of(x):
        return model(x).pow(2).mean()

    counted = torch._dynamo.utils.counters["stats"]
    while True:
        optimizer.zero_grad()
        loss_of(torch.randn(BATCH, WIDTH)).backward()
        optimizer.step()
        compiled.graphs = counted["unique_graphs"]
        yield


@mode
def two_optimizers():
    """Both step in every step, one after the other, on parts of one model."""
    model = net()
    first, second = torch.optim.AdamW(model[0].parameters()), torch.optim.SGD(model[2].parameters(), lr=1e-3)
    while True:
        for _ in range(2):
            model(torch.randn(BATCH, WIDTH)).pow(2).mean().backward()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
        yield


@mode
def adversaries():
    """A generator and its critic, a step each in turn."""
    generator, critic = net(), net()
    of_critic = torch.optim.Adam(critic.parameters())
    of_generator = torch.optim.Adam(generator.parameters())
    while True:
        of_critic.zero_grad()
        (
            critic(torch.randn(BATCH, WIDTH)).mean() - critic(generator(torch.randn(BATCH, WIDTH)).detach()).mean()
        ).backward()
        of_critic.step()
        of_generator.zero_grad()
        critic(generator(torch.randn(BATCH, WIDTH))).mean().backward()
        of_generator.step()
        yield


parser = argparse.ArgumentParser()
parser.add_argument("mode", choices=sorted(MODES))
parser.add_argument("--steps", type=int, default=12)
options = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(0)
for step, _ in enumerate(MODES[options.mode](), 1):
    if step == options.steps:
        break
sys.stdout.write(f"steps {step} graphs {getattr(compiled, 'graphs', None)}\n")
