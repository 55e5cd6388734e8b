"""Rules on data loading: ``loader_startup`` for stalls in a few steps, ``slow_sampler`` for what no worker takes over,
``dataloader_workers`` for all others, and ``sampler`` for samples that ranks or epochs repeat.
"""
