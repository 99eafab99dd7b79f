"""The core's conformance kit, for this store."""

from fastdeploy_testing.conformance.test_kv_store import KVStoreConformance


class TestMyDisk(KVStoreConformance):
    kind = "kv_store"
    driver_name = "mydisk"
