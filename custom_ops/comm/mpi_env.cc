#include "comm/mpi_env.h"

#include <mpi.h>

#include <algorithm>
#include <string>

#include "comm/types.h"

namespace tfscale {

void Check(int rc, const char* function) {
  if (rc == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  if (MPI_Error_string(rc, text, &length) != MPI_SUCCESS) length = 0;
  // One line, of which nothing is lost on the way to the user.
  std::string reason(text, static_cast<size_t>(length));
  std::replace(reason.begin(), reason.end(), '\n', ' ');
  throw CommError(std::string(function) + ": " + reason);
}

MpiEnv::MpiEnv() {
  int is_finalized = 0;
  Check(MPI_Finalized(&is_finalized), "MPI_Finalized");
  if (is_finalized) {
    // MPI would end the process at the next call.
    throw CommError(
        "MPI has been ended in this process: tfscale can be started once per process. Received: "
        "one start more. Start a new process, or keep MPI initialised yourself.");
  }
  int is_initialized = 0;
  Check(MPI_Initialized(&is_initialized), "MPI_Initialized");
  if (is_initialized) {
    Check(MPI_Query_thread(&thread_level_), "MPI_Query_thread");
  } else {
    Check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &thread_level_),
          "MPI_Init_thread");
    owns_ = true;
    // Errors found by calls without a communicator (MPI_Testsome) are reported on
    // these two, whose default is to end the process. mpi4py sets them likewise.
    Check(MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    Check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  }
  if (thread_level_ < MPI_THREAD_SERIALIZED) {
    throw CommError(
        "MPI must be initialised with the thread level SERIALIZED or MULTIPLE. Received: level " +
        std::to_string(thread_level_) +
        ". Call tfscale.init() before MPI is initialised elsewhere, or ask for MULTIPLE there.");
  }
}

MpiEnv::~MpiEnv() {
  int is_finalized = 0;
  if (owns_ && MPI_Finalized(&is_finalized) == MPI_SUCCESS && !is_finalized) MPI_Finalize();
}

}  // namespace tfscale
