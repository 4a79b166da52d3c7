// Storages that refuse to be read, with a message of ours.
//
// They are not part of PyTorch's stable ABI, so this module alone is tied to the version that it
// was built against: zero_runtime/memory/freed.py does not use it beside another.

#include <Python.h>
#include <c10/core/StorageImpl.h>
#include <torch/version.h>

#include <string>

namespace {

PyObject* Refuse(PyObject*, PyObject* args) {
  unsigned long long storage = 0;
  unsigned long long nbytes = 0;
  const char* message = nullptr;
  if (!PyArg_ParseTuple(args, "KKs", &storage, &nbytes, &message)) {
    return nullptr;
  }
  auto* const impl = reinterpret_cast<c10::StorageImpl*>(static_cast<uintptr_t>(storage));
  impl->set_nbytes(static_cast<size_t>(nbytes));  // views of it can be made, and are no error yet
  impl->release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(message));
  Py_RETURN_NONE;
}

}  // namespace

PyMODINIT_FUNC PyInit__freed() {
  static PyMethodDef methods[] = {{"refuse", Refuse, METH_VARARGS,
                                   "Have an empty storage pass for one of so many bytes, and raise "
                                   "the message when it is read."},
                                  {nullptr, nullptr, 0, nullptr}};
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_freed", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
  PyObject* const made = PyModule_Create(&module);
  if (made != nullptr && PyModule_AddStringConstant(made, "TORCH", TORCH_VERSION) != 0) {
    Py_DECREF(made);
    return nullptr;
  }
  return made;
}
