"""Figures of an analysis: a Summary in, ``plotly.graph_objects.Figure`` out. The page, notebooks and image files show
the same ones.

colours         colours of the categories, of series and of the page, in light and dark
numbers         rounds what is drawn to what a screen shows
layout          what all figures share: text made safe, layout, axes, the look on narrow screens
breakdown       the time breakdown per rank, as bars or as a heat map
step            one step of all ranks by category; the critical path
timeline        one step of selected ranks by lanes
pipeline        one step of every stage: busy and bubbles
run             step times, the whole run's and the recorded ones; what-if curves
communication   overlap, last arrivals, bandwidth
memory, system  memory, hosts and devices over time
figures         all of one summary, by name, and as image files
"""
