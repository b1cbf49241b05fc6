// The MPI functions that custom_ops/comm uses, for the simulated network (network.cc).
#ifndef TFSCALE_TEST_SIM_MPI_H_
#define TFSCALE_TEST_SIM_MPI_H_

#define MPI_VERSION 4

typedef int MPI_Comm;
typedef int MPI_Group;
typedef int MPI_Datatype;  // its size in bytes
typedef int MPI_Op;
typedef int MPI_Info;
typedef int MPI_Errhandler;
typedef int MPI_Fint;
typedef struct SimRequest* MPI_Request;

typedef struct {
  int MPI_SOURCE;
  int MPI_TAG;
  int MPI_ERROR;
  int count;  // bytes
} MPI_Status;

#define MPI_COMM_NULL (-1)
#define MPI_COMM_WORLD 0
#define MPI_COMM_SELF 1
#define MPI_GROUP_NULL (-1)
#define MPI_REQUEST_NULL ((MPI_Request) nullptr)
#define MPI_STATUS_IGNORE ((MPI_Status*)nullptr)
#define MPI_INFO_NULL 0
#define MPI_ERRORS_RETURN 1
#define MPI_ANY_SOURCE (-2)
#define MPI_ANY_TAG (-1)
#define MPI_UNDEFINED (-32766)
#define MPI_BYTE 1
#define MPI_CHAR 1
#define MPI_INT 4
#define MPI_SUM 1
#define MPI_TAG_UB 1
#define MPI_COMM_TYPE_SHARED 1
#define MPI_THREAD_SERIALIZED 2
#define MPI_THREAD_MULTIPLE 3
#define MPI_MAX_ERROR_STRING 128
#define MPI_MAX_PROCESSOR_NAME 64

#define MPI_SUCCESS 0
#define MPI_ERR_TRUNCATE 14
#define MPI_ERR_OTHER 15
#define MPI_ERR_IN_STATUS 17

extern "C" {
int MPI_Init_thread(int* argc, char*** argv, int required, int* provided);
int MPI_Initialized(int* flag);
int MPI_Finalize();
int MPI_Finalized(int* flag);
int MPI_Query_thread(int* provided);
int MPI_Abort(MPI_Comm comm, int code);
int MPI_Error_class(int code, int* error_class);
int MPI_Error_string(int code, char* text, int* length);
int MPI_Get_processor_name(char* name, int* length);
MPI_Comm MPI_Comm_f2c(MPI_Fint handle);

int MPI_Comm_set_errhandler(MPI_Comm comm, MPI_Errhandler handler);
int MPI_Comm_rank(MPI_Comm comm, int* rank);
int MPI_Comm_size(MPI_Comm comm, int* size);
int MPI_Comm_get_attr(MPI_Comm comm, int key, void* value, int* flag);
int MPI_Comm_dup(MPI_Comm comm, MPI_Comm* made);
int MPI_Comm_split(MPI_Comm comm, int color, int key, MPI_Comm* made);
int MPI_Comm_split_type(MPI_Comm comm, int type, int key, MPI_Info info, MPI_Comm* made);
int MPI_Comm_group(MPI_Comm comm, MPI_Group* group);
int MPI_Comm_create_group(MPI_Comm comm, MPI_Group group, int tag, MPI_Comm* made);
int MPI_Comm_free(MPI_Comm* comm);
int MPI_Group_incl(MPI_Group group, int n, const int* ranks, MPI_Group* made);
int MPI_Group_free(MPI_Group* group);

int MPI_Allgather(const void* in, int n_in, MPI_Datatype in_type, void* out, int n_out,
                  MPI_Datatype out_type, MPI_Comm comm);
int MPI_Allreduce(const void* in, void* out, int n, MPI_Datatype type, MPI_Op op, MPI_Comm comm);
int MPI_Exscan(const void* in, void* out, int n, MPI_Datatype type, MPI_Op op, MPI_Comm comm);
int MPI_Bcast(void* data, int n, MPI_Datatype type, int root, MPI_Comm comm);

int MPI_Isend(const void* data, int n, MPI_Datatype type, int to, int tag, MPI_Comm comm,
              MPI_Request* request);
int MPI_Irecv(void* data, int n, MPI_Datatype type, int from, int tag, MPI_Comm comm,
              MPI_Request* request);
int MPI_Recv(void* data, int n, MPI_Datatype type, int from, int tag, MPI_Comm comm,
             MPI_Status* status);
int MPI_Iprobe(int from, int tag, MPI_Comm comm, int* flag, MPI_Status* status);
int MPI_Testsome(int n, MPI_Request* requests, int* n_done, int* indices, MPI_Status* statuses);
int MPI_Get_count(const MPI_Status* status, MPI_Datatype type, int* count);
int MPI_Cancel(MPI_Request* request);
}

#endif  // TFSCALE_TEST_SIM_MPI_H_
