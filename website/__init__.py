"""The documentation's site: hooks of MkDocs, the pages that are made from the code, and the check of its links."""
