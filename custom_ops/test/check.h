// Checks of the C++ tests: a failed one ends the job, and so does a hang.
#ifndef TFSCALE_TEST_CHECK_H_
#define TFSCALE_TEST_CHECK_H_

#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

namespace tfscale {
namespace testing {

struct TestCase {
  const char* name;
  void (*body)();
};

inline std::vector<TestCase>& TestCases() {
  static std::vector<TestCase> cases;
  return cases;
}

struct Registration {
  Registration(const char* name, void (*body)()) { TestCases().push_back({name, body}); }
};

// What messages begin with: the rank, once it is known.
inline std::string& Prefix() {
  static std::string prefix;
  return prefix;
}

// Ends this rank at once; mpiexec ends the others. Ranks that disagree about a
// result would otherwise wait for each other.
[[noreturn]] inline void FailTest(const char* file, int line, const std::string& what) {
  std::cerr << Prefix() << file << ":" << line << ": " << what << std::endl;
  std::_Exit(1);
}

inline const char*& CurrentTest() {
  static const char* name = "";
  return name;
}

extern "C" inline void OnAlarm(int) {
  // Only functions that are safe in a signal handler.
  const char* parts[] = {"\nHANG in test ", CurrentTest(), "\n"};
  for (const char* part : parts) {
    if (write(STDERR_FILENO, part, std::strlen(part)) < 0) break;
  }
  _exit(1);
}

// Runs all cases in the order of the file, each for at most `limit_s` seconds: long enough for a
// sanitizer on a machine that does other work.
inline int RunTests(unsigned limit_s = 300) {
  std::signal(SIGALRM, OnAlarm);
  for (const TestCase& test : TestCases()) {
    CurrentTest() = test.name;
    alarm(limit_s);
    try {
      test.body();
    } catch (const std::exception& error) {
      FailTest(test.name, 0, std::string("uncaught exception: ") + error.what());
    }
  }
  CurrentTest() = "(end of the process)";
  alarm(limit_s);
  return 0;
}

template <typename A, typename B>
void CheckEqual(const A& a, const B& b, const char* expression, const char* file, int line) {
  if (a == b) return;
  std::ostringstream text;
  text << expression << ": " << a << " is not " << b;
  FailTest(file, line, text.str());
}

inline void CheckContains(const std::string& text, const std::string& part, const char* file,
                          int line) {
  if (text.find(part) == std::string::npos) {
    FailTest(file, line, "'" + text + "' does not contain '" + part + "'");
  }
}

}  // namespace testing
}  // namespace tfscale

#define TEST(name)                                                                \
  static void name();                                                             \
  static const ::tfscale::testing::Registration name##_registration(#name, name); \
  static void name()

#define CHECK_TRUE(condition) \
  ((condition) ? (void)0 : ::tfscale::testing::FailTest(__FILE__, __LINE__, #condition))
#define CHECK_EQ(a, b) ::tfscale::testing::CheckEqual(a, b, #a " == " #b, __FILE__, __LINE__)
#define CHECK_CONTAINS(text, part) ::tfscale::testing::CheckContains(text, part, __FILE__, __LINE__)
// The statement throws a CommError whose text contains `part`.
#define CHECK_THROWS(statement, part)                                                  \
  do {                                                                                 \
    bool has_thrown = false;                                                           \
    try {                                                                              \
      statement;                                                                       \
    } catch (const ::tfscale::CommError& error) {                                      \
      has_thrown = true;                                                               \
      CHECK_CONTAINS(error.what(), part);                                              \
    }                                                                                  \
    if (!has_thrown) {                                                                 \
      ::tfscale::testing::FailTest(__FILE__, __LINE__, "nothing thrown: " #statement); \
    }                                                                                  \
  } while (false)

#endif  // TFSCALE_TEST_CHECK_H_
