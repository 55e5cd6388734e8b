"""diffusers' training example for unconditional images, on Accelerate."""

import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from log import log

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = UNet2DModel(
    sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(32, 64),
    down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
)  # fmt: skip
schedule = DDPMScheduler(num_train_timesteps=100)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
images = torch.utils.data.DataLoader(torch.randn(200, 3, 16, 16), batch_size=4)
model, optimizer, images, rate = accelerator.prepare(
    model, optimizer, images, get_cosine_schedule_with_warmup(optimizer, 5, 20)
)
for batch, _ in zip(images, range(20), strict=False):
    noise = torch.randn_like(batch)
    when = torch.randint(0, 100, (len(batch),))
    predicted = model(schedule.add_noise(batch, noise, when), when, return_dict=False)[0]
    loss = torch.nn.functional.mse_loss(predicted, noise)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    rate.step()
    optimizer.zero_grad()
    log(loss.item())
accelerator.end_training()
