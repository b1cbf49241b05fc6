// The MPI library: initialised if it is not yet, finalised only if initialised here.
#ifndef TFSCALE_COMM_MPI_ENV_H_
#define TFSCALE_COMM_MPI_ENV_H_

namespace tfscale {

// Throws CommError "<function>: <MPI's own text>" when `rc` is not success.
void Check(int rc, const char* function);

// Owns the initialised state of MPI. Created and destroyed on the main thread.
// The thread level must be SERIALIZED at least: the communication thread is not
// the one that initialised MPI. MULTIPLE is asked for, so that Python may call
// MPI too.
class MpiEnv {
 public:
  MpiEnv();
  ~MpiEnv();
  MpiEnv(const MpiEnv&) = delete;
  MpiEnv& operator=(const MpiEnv&) = delete;

  int thread_level() const { return thread_level_; }
  // After a failure ending MPI could block on what will never complete.
  void LeaveUnfinalized() { owns_ = false; }

 private:
  bool owns_ = false;
  int thread_level_ = 0;
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_MPI_ENV_H_
