"""A binding over the DOCA SDK's C libraries: what both ends of the `doca` transport call, and what they tell each
other.

Loaded at run time, so nothing of DOCA is needed to install or import it.
"""
