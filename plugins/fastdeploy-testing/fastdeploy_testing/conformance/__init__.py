"""The conformance kit: one pytest suite per kind of driver, inheritable by plugins.

`fastdeploy plugins check NAME` runs it; a plugin's own tests subclass a suite and name the driver:

    from fastdeploy_testing.conformance.test_device import DeviceConformance

    class TestMyChip(DeviceConformance):
        driver_name = "mychip"

A capability that the driver does not declare is skipped with the reason; a declared one is tested.
"""
