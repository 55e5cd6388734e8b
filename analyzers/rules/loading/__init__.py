"""Rules on data loading: ``loader_startup`` for stalls in a few steps, ``dataloader_workers`` for all others, and
``sampler`` for samples that ranks or epochs repeat.
"""
