"""The MCP server: what its tools answer, against the truth of sample recordings and of simulated jobs."""
