"""Notes, as inductor compiles, which lines of the model each kernel of its code computes.

Nothing is set, so the compiler does and caches what it would do without; its functions are called through. ``watch``
puts itself around them once ``torch._inductor`` is there, ``sources`` leads a node of a graph back to module and line,
``kept`` has it for a graph that torch takes from its cache in a later process, ``cached`` reads what such a graph holds
itself, ``annotated`` what the program said of kernels in its CUDA graphs; ``cost`` what compiling took;
``names`` collects it all and writes the file.
"""
