"""Rules on compute: ``mixed_precision`` for matrix kernels in single precision, ``batch_size`` for too little of it per
communication.
"""
