"""The launching side: ``run`` prepares the folder and runs the command, ``bootstrap`` gets the collector into each
Python process of it, ``nsys`` runs it under Nsight Systems, ``recap`` reports at the end what was recorded, with
``failed`` how ranks ended. ``folder`` is the recording's folder before anything is recorded.
"""
