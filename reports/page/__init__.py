"""The report: a Summary in, one HTML file out.

Each section's module makes its captions, its tables and what its charts draw; ``page`` puts them into the template.

overview, tiles     the first screen: the job, its numbers, how sure the verdict is
advice              the findings as cards: what to change, and the speedup
breakdown           the time breakdown per rank
timeline, charts    one step by lanes and by category, the critical path, step times, what-if curves
pipeline            stages and bubbles
run_history         step times of the whole run
evidence            tables: stragglers, critical path, data loading, utilization, clocks
memory, system      memory, hosts and devices over time
communication       overlap, last arrivals, bandwidth
kernels             kernels, operators, modules, launches
gaps                what is missing or uncertain
definitions         the glossary
numbers             rounds what the charts draw
page                all of it as one file
"""
