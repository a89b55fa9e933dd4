"""When work is done, and how much at a time: classes and deadlines, sensors, the controller. Nothing here changes what comes out.

May import :mod:`lfdata.errors` only. Device libraries are imported where a sensor is made.
"""
