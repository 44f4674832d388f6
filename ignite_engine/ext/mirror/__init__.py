"""Checkpoints in a second place: a directory or a URL of fsspec, uploaded beside training and fetched by a resume.

A mirror has the layout of a folder of checkpoints, ``URL/iteration_00000500/manifest.json``, and is that of one run.
The files of a checkpoint are uploaded first and its manifest last; the manifest is the first to be deleted: without it
there is no checkpoint.
"""
