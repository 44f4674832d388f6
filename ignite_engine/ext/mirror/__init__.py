"""Mirrors of checkpoints: a directory or a URL of fsspec, uploaded during training and fetched by a resume.

A mirror has the layout of a folder of checkpoints, ``URL/iteration_00000500/manifest.json``, and belongs to one run.
The files of a checkpoint are uploaded first and its manifest last; the manifest is the first to be deleted: without it
there is no checkpoint.
"""
