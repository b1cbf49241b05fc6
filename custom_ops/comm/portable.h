// Included before every file of the libraries (-include): they load on systems with glibc 2.28 and
// the C++ library of GCC 8, however new the system is that compiles them. A name is bound to its
// oldest version, or is defined here where old systems lack it. tests/unit/test_symbols.py.
#ifndef TFSCALE_COMM_PORTABLE_H_
#define TFSCALE_COMM_PORTABLE_H_

#include <new>

#if defined(__x86_64__) && defined(__GLIBC__)

// In glibc 2.34 these moved from libpthread to libc, and became new versions of themselves.
__asm__(".symver pthread_condattr_setclock,pthread_condattr_setclock@GLIBC_2.3.3");
__asm__(".symver pthread_create,pthread_create@GLIBC_2.2.5");
__asm__(".symver pthread_kill,pthread_kill@GLIBC_2.2.5");
__asm__(".symver pthread_once,pthread_once@GLIBC_2.2.5");
__asm__(".symver pthread_setaffinity_np,pthread_setaffinity_np@GLIBC_2.3.4");
__asm__(".symver pthread_setname_np,pthread_setname_np@GLIBC_2.12");
// std::condition_variable::wait, of GCC 12.
__asm__(
    ".symver _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE,"
    "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");
// The default constructor of std::ostringstream, of GCC 9, is the one with the mode std::ios::out.
__asm__(
    ".pushsection .text._ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev,\"axG\","
    "@progbits,_ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev,comdat\n"
    ".weak _ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev\n"
    ".hidden _ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev\n"
    ".type _ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev,@function\n"
    "_ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev:\n"
    "movl $16,%esi\n"
    "jmp _ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1ESt13_Ios_Openmode@PLT\n"
    ".popsection");

#define TFSCALE_OWN __attribute__((weak, visibility("hidden")))
// Of glibc 2.32: whether atomic operations may be plain ones. There are several threads here.
extern "C" {
extern TFSCALE_OWN char __libc_single_threaded;
TFSCALE_OWN char __libc_single_threaded = 0;
}
namespace std {
// Of GCC 11.
[[noreturn]] TFSCALE_OWN void __throw_bad_array_new_length();
void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}  // namespace std
#undef TFSCALE_OWN

#endif  // defined(__x86_64__) && defined(__GLIBC__)

#endif  // TFSCALE_COMM_PORTABLE_H_
