"""The core's conformance kit, for this transport."""

from fastdeploy_testing.conformance.test_kv_transport import KVTransportConformance
from fastdeploy_testing.conformance.test_kv_transport_faults import KVTransportFaultsConformance


class TestMyWire(KVTransportConformance):
    kind = "kv_transport"
    driver_name = "mywire"


class TestMyWireFaults(KVTransportFaultsConformance):
    kind = "kv_transport"
    driver_name = "mywire"
