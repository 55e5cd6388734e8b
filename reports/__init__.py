"""A result in, something to read out. Reports read no traces and decide nothing: they write what the analysis found.

page/           an analysis as one self-contained HTML page
compare/        a comparison or a check as a page, and in the terminal
figures/        the charts, as plotly figures
html            self-contained HTML files
terminal        an analysis as plain text
markdown        an analysis, a comparison or a check for a pull request
notebook        an analysis in a notebook's cell
junit           a check as JUnit XML, for continuous integration
tensorboard     curves as TensorBoard event files
tables          tables as pages show them; kernel_names shortens what is in them
templates/, assets/   the pages' HTML, styles and scripts
"""
