"""The report: a Summary in, one HTML file out.

Each section's module makes its tables, and says in words what its charts (``reports.figures``) show; ``page`` puts
them into the template.

overview, tiles     the first screen: the job, its numbers, how sure the verdict is
advice              the findings as cards: what to change, and the speedup
breakdown           the time breakdown per rank
timeline, charts    the charts of steps in words: lanes, categories, critical path, step times, what-if curves
roles               several roles side by side
pipeline            stages and bubbles
run_history         step times of the whole run
evidence            tables: stragglers, critical path, data loading, utilization, clocks
memory, system      memory, hosts and devices over time
communication       overlap, last arrivals, bandwidth
kernels             kernels, operators, modules, launches
gaps                what is missing or uncertain
definitions         the glossary
page                all of it as one file
"""
