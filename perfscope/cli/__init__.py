"""The command line, one module for each verb, which parses options and prints: ``main`` loads a verb when it is called.

``run`` and ``trigger`` hand over to ``collectors``, ``gather`` to ``recording``, the others to ``analyzers``, whose
results ``reports`` renders. Errors that a user can mend end with exit code 2 and their message alone.
"""
