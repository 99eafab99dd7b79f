"""For authors of plugins: conformance kit, fakes, templates, `fastdeploy plugins check` and `new`.

A plugin's tests import this package; a deployment does not install it. It examines the core from
inside, so it uses private rooms of the core and is released with it, under the same version.
"""
