"""``perfscope mcp``: recordings in a folder, asked by agents over the Model Context Protocol.

A tool call comes in, an answer goes out that is no longer than was promised. Nothing outside of the folder is read, and
nothing is written but the cache.

- ``folder``: the recordings in the folder, by name; ``opened``: their analyses, kept between calls
- ``schemas``: an answer as JSON, and its JSON Schema; ``pages``: as much of it as one answer may hold
- ``answers``: what the tools return; ``overview``, ``ranks``, ``work``, ``run`` and ``changes``: the tools by subject
- ``prompts``: tasks that a user can start; ``serve``: all of it as a server
"""
